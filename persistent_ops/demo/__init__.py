"""The demo of the package: a DLRM embedding exchange on real or synthetic input, checked against torch."""
