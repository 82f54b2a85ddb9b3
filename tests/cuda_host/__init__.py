"""The CUDA lane, ``make test-cuda-host``: torch's CUDA build on the stand-in of tests/standin."""
