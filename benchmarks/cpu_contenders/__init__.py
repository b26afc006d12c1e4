"""Adapters of the inference engines that ``cpu_decode.py`` compares, one module per engine.

Each has ``open_contender(path, option, threads)``, which loads the model. The modules run in the
engines' own environments, which lack interposer and sometimes torch. So a module imports only the
standard library and its engine.
"""
