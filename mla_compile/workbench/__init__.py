"""The work behind the commands: measuring decode steps, planning for a machine, and the demo."""
