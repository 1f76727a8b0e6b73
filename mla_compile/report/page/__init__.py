"""The report as one HTML page: its content, the layout of drawings and charts, and the writing of the file."""
