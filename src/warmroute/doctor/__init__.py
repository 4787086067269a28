"""`warmroute doctor`: asks each node of a configuration what the router needs from it, and says what to change."""
