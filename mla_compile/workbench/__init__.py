"""What the commands do: measuring decode steps, planning for a machine, and the demo."""
