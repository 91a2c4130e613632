"""The parts of ``install.py``: reading what is asked for, answering lines of
another build, moving what is there.
"""
