"""Reasoning and tool calls in generated text: formats as data, one parser, one writer, one grammar.

A checkpoint writes its reasoning and its tool calls between markers that it was trained with.
``formats`` describes these formats, ``detection`` finds the format of a checkpoint, ``parser``
reads a stream of tokens, ``writer`` writes calls, and ``grammar`` enforces a call.
"""
