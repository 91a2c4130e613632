"""Finds defects in Dockerfiles, ours or anybody's: text in, findings out, no effects."""
