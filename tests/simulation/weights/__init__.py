"""The weights' protocol in virtual time: the workers' Landing and the trainers' Links are those that ship.

What a rank does with its links (``trainer.py``), how a worker carries out what Landing decides
(``worker.py``) and an engine's controller (``controller.py``) are models of pusher.py, receiver.py and
controller.py, which block, or run on asyncio.
"""
