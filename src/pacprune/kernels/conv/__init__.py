"""A population's convolutions, and where elementwise operations are taken between them."""
