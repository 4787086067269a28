"""Several router processes in front of one fleet: what they tell each other, and what each does with it."""
