"""From a frame to the user's line, the expression for each tensor, the name of the API.

Nothing of the user's is run, and nothing here knows the recorder.
"""
