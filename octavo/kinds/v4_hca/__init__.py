"""DeepSeek-V4's heavily compressed attention: a window, and all of the past as one entry per large
group of tokens.
"""
