"""The report as one HTML page: what it says, where its boxes and marks stand, and the file."""
