"""`warmroute serve --workers N`, a parent process that accepts connections and N workers that serve them; and
replicas of the router over Redis or Valkey. Both show one router to their operator.
"""
