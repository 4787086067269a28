"""`warmroute serve --workers N`: a parent process that accepts connections, and N workers that serve them."""
