"""Where nodes come from: one small file for each kind of cloud."""
