"""gpytorch: an exact process and a sparse variational classifier."""

import gpytorch
import torch
from gpytorch import distributions, kernels, likelihoods, means, mlls, models, variational

LIBRARIES = ("gpytorch",)


class Exact(models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean, self.kernel = means.ConstantMean(), kernels.ScaleKernel(kernels.RBFKernel())

    def forward(self, x):
        return distributions.MultivariateNormal(self.mean(x), self.kernel(x))


class Sparse(models.ApproximateGP):
    def __init__(self, points):
        shape = variational.CholeskyVariationalDistribution(len(points))
        super().__init__(variational.VariationalStrategy(self, points, shape))
        self.mean, self.kernel = (
            means.ConstantMean(),
            kernels.ScaleKernel(kernels.MaternKernel(1.5)),
        )

    def forward(self, x):
        return distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def program():
    x = torch.linspace(0, 1, 30, device="cuda")
    y = torch.cos(5 * x) + 0.1 * torch.randn(30, device="cuda")
    likelihood = likelihoods.GaussianLikelihood().cuda()
    exact = Exact(x, y, likelihood).cuda().train()
    marginal = mlls.ExactMarginalLogLikelihood(likelihood, exact)
    optimizer = torch.optim.Adam(exact.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (-marginal(exact(x), y)).backward()
        optimizer.step()
    exact.eval()
    likelihood.eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        guess = likelihood(exact(torch.linspace(0, 1, 9, device="cuda")))
    sparse, coin = Sparse(x[::5, None].clone()).cuda(), likelihoods.BernoulliLikelihood().cuda()
    bound = mlls.VariationalELBO(coin, sparse, 30)
    optimizer = torch.optim.Adam(sparse.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        (-bound(sparse(x[:, None]), (y > 0).float())).backward()
        optimizer.step()
    return exact.state_dict(), guess.mean, guess.confidence_region(), sparse.state_dict()
