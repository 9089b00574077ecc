"""The command line: one file a verb, each with a `register(app)`.

Only this room prints or reads the environment.
"""
