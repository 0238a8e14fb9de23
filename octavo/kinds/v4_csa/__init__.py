"""DeepSeek-V4's compressed sparse attention: a window, and those of many compressed entries that an
indexer picks.
"""
