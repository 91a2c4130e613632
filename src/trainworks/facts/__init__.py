"""Facts: the rows of ``images/`` and the recipes of ``templates/``, read once
and validated as a whole.
"""
