"""DeepSeek-V4 without compression: every token sees a window of entries that are key and value at
once.
"""
