"""Labels of images under masks: exact ones, and faster ones that are checked against them."""
