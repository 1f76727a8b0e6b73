"""The report as one HTML page: what it says, where its boxes and marks are, and how the file is written."""
