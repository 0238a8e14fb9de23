"""The HTTP side: an OpenAI-compatible server around ``AsyncLLM``. It knows no pages, no tensors and
no threads.
"""
