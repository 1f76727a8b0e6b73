"""All code that uses Dynamo: the backend's compiler, the forward of optimized modules, and the trace for reports."""
