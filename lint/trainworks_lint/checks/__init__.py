"""The rules' checks, by what they look at: each takes a document and yields hits."""
