"""Unchanged handlers of S3 Object Lambda, run by the gateway."""

from penstock.gateway.aws_lambda.bucket import LambdaBucket
from penstock.gateway.aws_lambda.responses import PATH, InternalEndpoint, WriteGetObjectResponse
from penstock.gateway.aws_lambda.sam import lambda_config_of
from penstock.gateway.aws_lambda.transform import LambdaTransform

__all__ = ["PATH", "InternalEndpoint", "LambdaBucket", "LambdaTransform", "WriteGetObjectResponse", "lambda_config_of"]
