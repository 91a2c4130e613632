"""What a host does, word for word, each with its reason.

``modes`` make a plan, ``plan`` is its form. Pure.
"""
