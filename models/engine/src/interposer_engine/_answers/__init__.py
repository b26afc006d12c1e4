"""Reasoning and tool calls in generated text: formats as data, one parser, one writer, one grammar.

A checkpoint is trained to write reasoning and tool calls between certain markers.
``formats`` describes these formats, ``detection`` finds the format of a checkpoint, ``parser``
reads a stream of tokens, ``writer`` writes calls, and ``grammar`` enforces a call.
"""
