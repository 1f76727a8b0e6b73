"""One spelling of every operator, before anything is analysed."""
