"""The papers behind guides, curvature structures and kernels, which name them in ``papers``."""

AMORTIZED = "Kingma & Welling (2014), Auto-encoding variational Bayes, ICLR, https://arxiv.org/abs/1312.6114"
ANCHORED_ENSEMBLES = (
    "Pearce, Leibfried & Brintrup (2020), Uncertainty in neural networks: approximately Bayesian "
    "ensembling, AISTATS, https://arxiv.org/abs/1810.05546"
)
BAYES_BY_BACKPROP = (
    "Blundell, Cornebise, Kavukcuoglu & Wierstra (2015), Weight uncertainty in neural networks, "
    "ICML, https://arxiv.org/abs/1505.05424"
)
CHAINS_OF_ENSEMBLE = (
    "Sommer, Robnik, Nozadze, Seljak & Rügamer (2025), Microcanonical Langevin ensembles, ICLR, "
    "https://arxiv.org/abs/2502.06335"
)
CONCRETE_DROPOUT = (
    "Gal, Hron & Kendall (2017), Concrete dropout, NeurIPS, https://arxiv.org/abs/1705.07832"
)
DEEP_ENSEMBLES = (
    "Lakshminarayanan, Pritzel & Blundell (2017), Simple and scalable predictive uncertainty "
    "estimation using deep ensembles, NeurIPS, https://arxiv.org/abs/1612.01474"
)
DIAGONAL = (
    "Becker & LeCun (1989), Improving the convergence of back-propagation learning with second "
    "order methods, Connectionist Models Summer School"
)
EKFAC = (
    "George, Laurent, Bouthillier, Ballas & Vincent (2018), Fast approximate natural gradient "
    "descent in a Kronecker-factored eigenbasis, NeurIPS, https://arxiv.org/abs/1806.03884"
)
FACTOR_COVARIANCE = (
    "Ong, Nott & Smith (2018), Gaussian variational approximation with a factor covariance "
    "structure, Journal of Computational and Graphical Statistics, "
    "https://arxiv.org/abs/1701.03208"
)
HMC = (
    "Neal (2011), MCMC using Hamiltonian dynamics, Handbook of Markov Chain Monte Carlo, "
    "https://arxiv.org/abs/1206.1901"
)
INDUCING = (
    "Ober & Aitchison (2021), Global inducing point variational posteriors for Bayesian neural "
    "networks and deep Gaussian processes, ICML, https://arxiv.org/abs/2005.08140"
)
KERNEL = (
    "Khan, Immer, Abedi & Korzepa (2019), Approximate inference turns deep networks into Gaussian "
    "processes, NeurIPS, https://arxiv.org/abs/1906.01930"
)
KFAC = (
    "Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate "
    "curvature, ICML, https://arxiv.org/abs/1503.05671"
)
KFAC_LAPLACE = (
    "Ritter, Botev & Barber (2018), A scalable Laplace approximation for neural networks, ICLR, "
    "https://openreview.net/forum?id=Skdvd2xAZ"
)
LAPLACE = (
    "MacKay (1992), A practical Bayesian framework for backpropagation networks, Neural "
    "Computation 4(3), https://doi.org/10.1162/neco.1992.4.3.448"
)
LAST_LAYER = (
    "Kristiadi, Hein & Hennig (2020), Being Bayesian, even just a bit, fixes overconfidence in "
    "ReLU networks, ICML, https://arxiv.org/abs/2002.10118"
)
LINEARIZED = (
    "Immer, Korzepa & Bauer (2021), Improving predictions of Bayesian neural nets via local "
    "linearization, AISTATS, https://arxiv.org/abs/2008.08400"
)
MAMS = (
    "Robnik, Cohn-Gordon & Seljak (2025), Metropolis adjusted microcanonical Hamiltonian Monte "
    "Carlo, https://arxiv.org/abs/2503.01707"
)
MATRIX_NORMAL = (
    "Louizos & Welling (2016), Structured and efficient variational deep learning with matrix "
    "Gaussian posteriors, ICML, https://arxiv.org/abs/1603.04733"
)
MCLMC = (
    "Robnik, De Luca, Silverstein & Seljak (2023), Microcanonical Hamiltonian Monte Carlo, Journal "
    "of Machine Learning Research 24, https://arxiv.org/abs/2212.08549"
)
MC_DROPOUT = (
    "Gal & Ghahramani (2016), Dropout as a Bayesian approximation, ICML, "
    "https://arxiv.org/abs/1506.02142"
)
MIXTURES_OF_LAPLACE = (
    "Eschenhagen, Daxberger, Hennig & Kristiadi (2021), Mixtures of Laplace approximations for "
    "improved post-hoc uncertainty in deep learning, https://arxiv.org/abs/2111.03577"
)
MULTI_SWAG = (
    "Wilson & Izmailov (2020), Bayesian deep learning and a probabilistic perspective of "
    "generalization, NeurIPS, https://arxiv.org/abs/2002.08791"
)
NUMPYRO = (
    "Phan, Pradhan & Jankowiak (2019), Composable effects for flexible and accelerated "
    "probabilistic programming in NumPyro, https://arxiv.org/abs/1912.11554"
)
NUTS = (
    "Hoffman & Gelman (2014), The No-U-Turn sampler, Journal of Machine Learning Research 15, "
    "https://arxiv.org/abs/1111.4246"
)
PATHFINDER = (
    "Zhang, Carpenter, Gelman & Vehtari (2022), Pathfinder: parallel quasi-Newton variational "
    "inference, Journal of Machine Learning Research 23, https://arxiv.org/abs/2108.03782"
)
PSGLD = (
    "Li, Chen, Carlson & Carin (2016), Preconditioned stochastic gradient Langevin dynamics for "
    "deep neural networks, AAAI, https://arxiv.org/abs/1512.07666"
)
PYRO = (
    "Bingham et al. (2019), Pyro: deep universal probabilistic programming, Journal of Machine "
    "Learning Research 20, https://arxiv.org/abs/1810.09538"
)
RANDOMIZED_SVD = (
    "Halko, Martinsson & Tropp (2011), Finding structure with randomness, SIAM Review 53(2), "
    "https://arxiv.org/abs/0909.4061"
)
SAMPLES = (
    "Antorán, Padhy, Barbano, Nalisnick, Janz & Hernández-Lobato (2023), Sampling-based inference "
    "for large linear models, with application to linearised Laplace, ICLR, "
    "https://arxiv.org/abs/2210.04994"
)
SGHMC = (
    "Chen, Fox & Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo, ICML, "
    "https://arxiv.org/abs/1402.4102"
)
SGLD = "Welling & Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics, ICML"
SGNHT = (
    "Ding, Fang, Babbush, Chen, Skeel & Neven (2014), Bayesian sampling using stochastic gradient "
    "thermostats, NeurIPS"
)
SMILE = (
    "Sommer, Diao, Robnik, Seljak & Rügamer (2026), Can microcanonical Langevin dynamics leverage "
    "mini-batch gradient noise?, https://arxiv.org/abs/2602.06500"
)
SUBNETWORK = (
    "Daxberger, Nalisnick, Allingham, Antorán & Hernández-Lobato (2021), Bayesian deep learning "
    "via subnetwork inference, ICML, https://arxiv.org/abs/2010.14689"
)
SWAG = (
    "Maddox, Garipov, Izmailov, Vetrov & Wilson (2019), A simple baseline for Bayesian uncertainty "
    "in deep learning, NeurIPS, https://arxiv.org/abs/1902.02476"
)
VARIATIONAL_LAST_LAYER = (
    "Harrison, Willes & Snoek (2024), Variational Bayesian last layers, ICLR, "
    "https://arxiv.org/abs/2404.11599"
)
VARIATIONAL_INFERENCE = (
    "Kucukelbir, Tran, Ranganath, Gelman & Blei (2017), Automatic differentiation variational "
    "inference, Journal of Machine Learning Research 18, https://arxiv.org/abs/1603.00788"
)
