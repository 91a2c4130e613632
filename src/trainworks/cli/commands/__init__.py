"""One file for each command of ``build.py``: ``parser()`` is its grammar, ``run(options, root)`` what it does.

``run`` returns the exit status, writes its result with ``cli.output.put`` and raises a ``TrainworksError`` for
everything that a user can act on. ``cli.main.COMMANDS`` names them.
"""
