"""From text to text: the engine around scheduler and runner, and the Python API."""
