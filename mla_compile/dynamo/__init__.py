"""Everything that uses Dynamo: the backend's compiler, an optimized module's forward, the trace for a report."""
