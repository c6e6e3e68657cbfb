"""Decodes pictures to pixels of the requested size, straight into an existing array: see README.md in this folder."""

from penstock.images.codecs import Picture, Size, mask_pixels, open_picture, rgb_pixels, rgb_pixels_of_many
from penstock.images.regions import Box, centre_box, random_box, shrink_factor, write_mask, write_region

__all__ = [
    "Box",
    "Picture",
    "Size",
    "centre_box",
    "mask_pixels",
    "open_picture",
    "random_box",
    "rgb_pixels",
    "rgb_pixels_of_many",
    "shrink_factor",
    "write_mask",
    "write_region",
]
