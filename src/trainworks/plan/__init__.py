"""Plans: from what was asked for and the facts to everything an image is made
of, as one frozen value. Pure.
"""
