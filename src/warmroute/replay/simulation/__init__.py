"""A simulated fleet in virtual time: fake engines behind the production router core."""
