"""From a frame to the user's line, the expression for each tensor, the name of the API.

No user code is run, and nothing here depends on the recorder.
"""
