"""SAM templates become handlers."""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.config import MIB
from penstock.errors import ConfigError
from penstock.gateway.aws_lambda import lambda_config_of
from penstock.gateway.aws_lambda.sam import HARMLESS, TAKEN, ignored_properties

RUNTIME = f"python{sys.version_info[0]}.{sys.version_info[1]}"
FULL = f"""
    AWSTemplateFormatVersion: "2010-09-09"
    Transform: AWS::Serverless-2016-10-31
    Parameters:
      Bucket: {{Type: String, Default: shards}}
      NoDefault: {{Type: String}}
    Mappings:
      Sizes: {{us-east-1: {{memory: 512}}}}
    Globals:
      Function:
        Timeout: 30
        Runtime: {RUNTIME}
        Environment:
          Variables: {{SHARED: "1", MODE: global}}
    Resources:
      Convert:
        Type: AWS::Serverless::Function
        Properties:
          Handler: app.lambda_handler
          CodeUri: code/
          MemorySize: !FindInMap [Sizes, !Ref AWS::Region, memory]
          Role: !GetAtt Role.Arn
          Policies:
            - S3ReadPolicy: {{BucketName: !Ref NoDefault}}
          Environment:
            Variables:
              MODE: !Sub "${{Bucket}}-${{!literal}}-${{AWS::AccountId}}"
              LIST: !Join [",", [a, !Ref Bucket]]
              COUNT: 3
              FLAG: true
      Role: {{Type: AWS::IAM::Role}}
      Point:
        Type: AWS::S3ObjectLambda::AccessPoint
        Properties:
          ObjectLambdaConfiguration:
            TransformationConfigurations:
              - Actions: [GetObject, HeadObject]
                ContentTransformation:
                  AwsLambda: {{FunctionArn: !GetAtt Convert.Arn, FunctionPayload: '{{"k": 1}}'}}
    Outputs:
      Arn: {{Value: !If [A, !GetAtt Convert.Arn, !ImportValue x]}}
"""


def written(folder: Path, text: str) -> Path:
    """A template with a folder of code beside it."""
    (folder / "code").mkdir(exist_ok=True)
    path = folder / "template.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_function_with_globals_and_references(tmp_path: Path) -> None:
    """All fields are taken, with defaults of Globals, parameters and mappings; intrinsic functions elsewhere do no harm."""
    config = lambda_config_of(written(tmp_path, FULL))
    assert config.handler == "app.lambda_handler"
    assert Path(config.code_dir) == tmp_path / "code"
    assert config.memory_bytes_max == 512 * MIB
    assert config.time_s_max == 30.0
    assert config.environment == {
        "SHARED": "1",
        "MODE": "shards-${literal}-000000000000",
        "LIST": "a,shards",
        "COUNT": "3",
        "FLAG": "true",
    }
    assert config.payload == '{"k": 1}'
    assert config.actions == ("GetObject", "HeadObject")


ONE = f"""
    Resources:
      One: {{Type: AWS::Serverless::Function, Properties: {{Handler: a.b, CodeUri: code, Runtime: {RUNTIME}}}}}
"""


def test_defaults_are_those_of_sam(tmp_path: Path) -> None:
    """Memory and time have SAM's defaults."""
    config = lambda_config_of(str(written(tmp_path, ONE)))
    assert (config.memory_bytes_max, config.time_s_max) == (128 * MIB, 3.0)
    assert (config.payload, config.actions) == ("", ("GetObject",))


def test_one_of_several_functions_is_named(tmp_path: Path) -> None:
    """``PATH:NAME`` or `function` chooses; without either, the error names the functions."""
    text = ONE + ONE.split("Resources:\n")[1].replace("One", "Two").replace("a.b", "c.d")
    path = written(tmp_path, text)
    assert lambda_config_of(f"{path}:Two").handler == "c.d"
    assert lambda_config_of(path, "One").handler == "a.b"
    with pytest.raises(ConfigError, match="2 functions: One, Two"):
        lambda_config_of(path)
    with pytest.raises(ConfigError, match="no function 'Three'; it has One, Two"):
        lambda_config_of(path, "Three")


def changed(old: str, new: str) -> str:
    """The simple template with another text."""
    assert old in ONE
    return ONE.replace(old, new)


WRONG = {
    "no_yaml": ("a: [", "is not valid YAML"),
    "no_template": ("- 1", "is not a template"),
    "no_resources": ("a: 1", "has no Resources"),
    "no_function": ("Resources: {A: {Type: B}}", "has 0 functions"),
    "unknown_parameter": (changed("a.b", "!Ref Missing"), "Handler refers to 'Missing'"),
    "attribute": (changed("a.b", "!GetAtt X.Y"), "uses !GetAtt"),
    "long_form": (changed("a.b", '{"Fn::ImportValue": x}'), "uses !ImportValue"),
    "no_text": (changed("a.b", "[1]"), "Handler must be text"),
    "memory": (changed("CodeUri", "MemorySize: 0, CodeUri"), "MemorySize must be a number from 1 to 10240"),
    "timeout": (changed("CodeUri", "Timeout: soon, CodeUri"), "Timeout must be a number from 1 to 900"),
    "bucket_code": (changed("CodeUri: code", "CodeUri: s3://a/b"), "only folders on this machine"),
    "missing_code": (changed("CodeUri: code", "CodeUri: other"), "is not a folder"),
    "image": (changed("CodeUri", "PackageType: Image, CodeUri"), "not images"),
    "other_language": (changed(RUNTIME, "nodejs20.x"), "only Python handlers"),
    "newer_python": (changed(RUNTIME, "python3.99"), "but the interpreter is"),
    "environment": (changed("CodeUri", "Environment: {Variables: [1]}, CodeUri"), "names with values"),
    "variable": (changed("CodeUri", "Environment: {Variables: {A: [1]}}, CodeUri"), "the variable A must be text"),
    "nul": (changed("CodeUri", 'Environment: {Variables: {A: "a\\0b"}}, CodeUri'), "'A', which cannot be a variable"),
    "variable_name": (
        changed("CodeUri", "Environment: {Variables: {A=B: c}}, CodeUri"),
        "'A=B', which cannot be a variable",
    ),
    "number_of_digits": (changed("CodeUri", f"MemorySize: '{'9' * 5000}', CodeUri"), "MemorySize must be a number"),
    "long_number": (changed("CodeUri", f"MemorySize: 0x{'f' * 9000}, CodeUri"), "not valid YAML"),
    "alias": ("Resources: &a {b: *a}", "1 uses an alias, which CloudFormation does not support"),
    "merge": ("a: &a {b: c}\nd: {<<: *a}", "2 uses an alias"),
    "nesting": ("[" * 150, "more than 100 lists and maps within each other"),
    "deep_nesting": ("[" * 100_000, "more than 100 lists|nesting depth"),  # PyYAML 6.0.4 has a limit of its own
    "open_variables": (
        changed("CodeUri", 'MemorySize: !Sub "' + "${" * 200_000 + '", CodeUri'),
        "MemorySize must be a number",
    ),
    "map_key": (changed("a.b", "!FindInMap [Sizes, [1], {a: b}]"), "uses !FindInMap"),
    "list_in_text": (changed("a.b", "!Sub ['${A}', {A: [1]}]"), "text cannot contain a list"),
    "long_code": (changed("CodeUri: code", f"CodeUri: {'c' * 5000}"), "is not a folder"),
    "dynamic": (changed("a.b", "'{{resolve:ssm:name}}'"), "Handler is a dynamic reference"),
    "composed": (changed("a.b", "!Sub ['{{res${A}', {A: 'olve:ssm:name}}'}]"), "Handler is a dynamic reference"),
    "python_object": ("Resources: !!python/object/apply:os.system [ls]", "is not valid YAML"),
}


@pytest.mark.parametrize("name", WRONG)
def test_templates_that_describe_no_handler(name: str, tmp_path: Path) -> None:
    """Each problem has a message that names the place."""
    text, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        lambda_config_of(written(tmp_path, text))


@pytest.mark.parametrize("text", ["", "t" * 1000])
def test_nested_references_are_bounded(tmp_path: Path, text: str) -> None:
    """References that multiply each other are an error before they take minutes or gigabytes."""
    value = f'"{text}"'
    for _ in range(12):
        value = f'!Sub ["{"${A}" * 20}", {{A: {value}}}]'
    with pytest.raises(ConfigError, match=r"more than (10000 references|1048576 characters)"):
        lambda_config_of(written(tmp_path, changed("a.b", value)))


def test_a_template_is_a_regular_file(tmp_path: Path) -> None:
    """A device without end, a pipe that nobody writes to, and a folder are refused at once."""
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match="is not a regular file"):
            lambda_config_of(path)


@pytest.mark.parametrize(
    "line", ["A: [secret]", "A: !Ref [secret]", "A: {b: secret", "A: '{{resolve:ssm:secret}}'", "A: !Nothing secret"]
)
def test_an_error_shows_no_value_of_a_variable(tmp_path: Path, line: str) -> None:
    """A message names the variable or the line, not what is in it."""
    path = written(tmp_path, changed("CodeUri", f"Environment: {{Variables: {{{line}}}}}, CodeUri"))
    with pytest.raises(ConfigError, match=r"variable A|Variables\.A|line 4") as raised:
        lambda_config_of(path)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("value", ["[1]", "x", "{ObjectLambdaConfiguration: [1]}",
    "{ObjectLambdaConfiguration: {TransformationConfigurations: [x, {ContentTransformation: [1]}]}}",
    "{ObjectLambdaConfiguration: {TransformationConfigurations: 5}}"])  # fmt: skip
def test_an_access_point_that_is_malformed_is_none(tmp_path: Path, value: str) -> None:
    """An Object Lambda access point that is not one of this function changes nothing."""
    point = f"      Point: {{Type: AWS::S3ObjectLambda::AccessPoint, Properties: {value}}}\n"
    assert lambda_config_of(written(tmp_path, ONE + point)).actions == ("GetObject",)


def test_references_in_a_circle_end(tmp_path: Path) -> None:
    """A parameter whose default refers to itself is an error."""
    text = 'Parameters: {A: {Default: {"Ref": A}}}' + textwrap.dedent(changed("a.b", "!Ref A"))
    with pytest.raises(ConfigError, match="refers to itself"):
        lambda_config_of(written(tmp_path, text))


def test_missing_template_and_interpreter(tmp_path: Path) -> None:
    """Paths that lead nowhere are named."""
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        lambda_config_of(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be started"):
        lambda_config_of(written(tmp_path, ONE), python="/nowhere/python")


IGNORED = {
    "Layers: [!Ref Numpy, 'arn:aws:lambda:us-east-1:1:layer:x:3']": "Layers is ignored (!Ref Numpy, arn:aws:lambda:us-east-1:1:"
    "layer:x:3); install what they contain for the interpreter of --lambda-python, or copy it into the folder of the code.",
    "VpcConfig: {SubnetIds: [a, b]}": "VpcConfig is ignored (SubnetIds: a, b); the handler runs in the network of "
    "this machine.",
    "FileSystemConfigs: [{Arn: a, LocalMountPath: /mnt/x}]": "FileSystemConfigs is ignored (Arn: a, LocalMountPath: /mnt/x); "
    "mount them on this machine at the same paths.",
    "Architectures: [s390x]": f"Architectures is s390x, and this machine is {platform.machine().lower()}; compiled "
    f"dependencies must be for {platform.machine().lower()}.",
    "MemorySzie: 512": "MemorySzie is ignored (512); it is not a property that is known here.",
    "Tags: {a: b}": "",
    "Policies: [S3ReadPolicy]": "",
    "Layers: []": "",
}


@pytest.mark.parametrize("line", IGNORED)
def test_what_has_no_effect_is_said(line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Properties that change a function's work in AWS and not here are warned of, with what to do; others are not."""
    text = FULL.replace("Handler: app.lambda_handler", f"Handler: app.lambda_handler\n          {line}")
    lambda_config_of(written(tmp_path, text))
    expected = [f"{tmp_path / 'template.yaml'}:Convert: {IGNORED[line]}"] if IGNORED[line] else []
    assert [record.getMessage() for record in caplog.records] == expected


def test_the_architecture_of_this_machine_is_not_warned_of() -> None:
    """An architecture has other names in a template than in the operating system."""
    name = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    assert not ignored_properties({"Architectures": [name]})
    assert not TAKEN & HARMLESS
