"""The weights' protocol in virtual time, with the shipped Landing of workers and Links of trainers.

Three parts are models: what a rank does with its links (``trainer.py``), how a worker executes what Landing
decides (``worker.py``), and an engine's controller (``controller.py``). The originals pusher.py, receiver.py
and controller.py block, or run on asyncio.
"""
