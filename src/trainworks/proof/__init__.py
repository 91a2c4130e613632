"""Proof of what is in an image: bills of materials, provenance, signatures. Pure: effects are the command line's.

The documents are written as the standards' own JSON; the tests hold them against the standards' schemas and against
independent readers (docs/adr/0020).
"""
