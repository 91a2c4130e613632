"""The command ``train``: its words, its help, what it prints.

``stand_ins``: other names it is called by.
"""
