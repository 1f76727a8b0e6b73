"""The verdict on each attention, from its sources, its proof and its costs."""
