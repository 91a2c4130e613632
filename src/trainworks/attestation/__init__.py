"""Proof of what is in an image: bills of materials and provenance, which cosign signs.

The documents are written as the standards' own JSON. The tests check them with the standards'
schemas and with independent readers (docs/adr/0020).
"""
