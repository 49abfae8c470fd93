"""The captions of a comparison's figures, by their names."""

CAPTIONS = {
    "bands": "Mean and 90 % interval of the function along the feature.",
    "sd_map": "The function's sd divided by the reference's, at the test points: red where a "
    "posterior is overconfident about the function, blue where it is underconfident.",
    "forest": "The function at four test points, ordered by the reference's sd; the shaded column "
    "is the reference's 90 % interval.",
    "calibration": "Calibration on the test data: below the diagonal, a posterior is "
    "overconfident about the targets.",
    "pit": "Where the test targets lie among the predictions (probability integral transform): "
    "flat within the band if calibrated, a valley if too narrow, a hill if too wide.",
    "function_space": "Mean and sd at each test point: on the diagonal, a posterior agrees with "
    "the reference.",
    "cost": "Time to fit against the distance to the reference. The dashed line is the distance "
    "between two halves of the reference's own draws.",
    "hyperparameters": "Latents that are single numbers, such as noise and scales: median, 50 % "
    "and 90 % interval.",
    "pairs": "Latents that are single numbers against each other.",
    "trace": "The chains' draws in order, for the function at test points and for latents that are "
    "single numbers: chains that mixed look alike.",
    "ranks": "Each chain's share of the ranks of all draws: flat where chains agree. The band is "
    "for independent draws.",
    "layers": "R-hat and effective draws of the weights of every site. Weights of networks may "
    "differ between chains where their functions agree.",
}
