"""The edge: the sockets of clients and nodes. It reads requests and streams responses; the core decides which node
serves.
"""
