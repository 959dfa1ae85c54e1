"""The networks of this project, and networks that wrap others: inpainting, flip ensembles, ensembles."""
