"""For tests of what uses penstock, and of stores that others write.

``contract``: what every store promises, as one pytest suite. ``ministack``: an S3 server on loopback.
"""
