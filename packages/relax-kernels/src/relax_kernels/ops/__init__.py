"""The public operators: each file checks its inputs and hands the call to a backend."""
