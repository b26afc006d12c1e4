"""The engines of ``cpu_decode.py``, one module for each library.

Each has ``open_engine(path, option, threads)``, which loads the model. The modules run in the
environments of the peers, which hold neither interposer nor always torch: they import nothing
but the standard library and their own peer.
"""
