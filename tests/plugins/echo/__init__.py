"""Echo attention, a sample kind: every token hears the opening of the text and what was said
last.
"""
