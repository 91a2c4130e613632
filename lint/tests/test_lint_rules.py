"""Every rule on small Dockerfiles: where it must speak (and on which line), and where it must not."""

from __future__ import annotations

import pytest

from trainworks_lint.linter import lint
from trainworks_lint.rules import RULES

BASE = "FROM debian@sha256:0 AS first\n"

CUDA_12_4 = "FROM nvidia/cuda:12.4.1-cudnn-devel-ubuntu22.04\n"
CUDA_13 = "FROM nvidia/cuda:13.0.1-devel-ubuntu22.04\n"
EFA = "RUN curl -fO https://a.example/aws-efa-installer-{}.tar.gz && {}./efa_installer.sh -y"
PLUGIN = "RUN git clone -b v{}-aws https://github.com/aws/aws-ofi-nccl.git"
INCOMPATIBLE: list[tuple[str, list[int]]] = [
    # torch 2.6 has wheels for CUDA 11.8, 12.4 and 12.6
    ("RUN pip install torch==2.6.0+cu121", [2]),
    ("RUN pip install torch==2.6.0 \\\n  --index-url https://download.pytorch.org/whl/cu121", [3]),
    ("FROM python:3.13\nRUN pip install torch==2.4.1", [2]),
    (f"{CUDA_12_4}RUN pip install tensorflow==2.10.0", [2]),
    ("FROM nvidia/cuda:12.5.1-cudnn8-devel-ubuntu22.04 AS a\nFROM a\nRUN pip install tensorflow==2.18.0", [3]),
    (f"{CUDA_12_4}RUN apt-get install -y libnccl2=2.27.7-1+cuda12.9", [2]),
    (f"{CUDA_12_4}RUN git clone -b v2.10.3-1 https://github.com/NVIDIA/nccl.git && make -C nccl src.build", [2]),
    (
        "FROM nvidia/cuda:12.8.0-devel-ubuntu22.04 AS a\nFROM nvidia/cuda:12.8.1-base-ubuntu22.04\nCOPY --from=a /u /u",
        [3],
    ),
    (
        f"{CUDA_13}RUN pip install https://a.example/flash_attn-2.8.3+cu12torch2.9cxx11abiTRUE-cp312-linux_x86_64.whl",
        [2],
    ),
    ("FROM ubuntu:20.04\nARG EFA_VERSION=1.43.1\nRUN curl -fO https://a.example/efa-$EFA_VERSION.tar.gz", [2]),
    ("FROM debian:12\n" + EFA.format("1.34.0", ""), [2]),
    ("FROM nvidia/cuda:12.9.1-devel-amzn2023\n" + EFA.format("1.48.0", ""), [2]),
    (EFA.format("1.47.0", ""), [2]),
    (PLUGIN.format("1.18.0"), [2]),
    (f"ARG NCCL_VERSION=2.12.10\n{PLUGIN.format('1.13.2')}", [3]),
    (f"ENV LIBFABRIC_VERSION=1.15.2\n{PLUGIN.format('1.9.1')}", [3]),
    ("RUN pip install cmake==4.0.2 && wget https://a.example/metis-5.1.0.tar.gz", [2]),
    ("RUN git clone -b v5.2.1 https://github.com/KarypisLab/METIS.git && make", [2]),
    ("ARG RMM_VERSION=0.15.0\nARG CMAKE_VERSION=3.10.2", [3]),
    ("ARG OPEN_MPI_VERSION=5.0.3\nRUN pip install https://a.example/smdistributed_dataparallel-2.3.0-cp311.whl", [3]),
    (f"{CUDA_12_4}RUN pip install torch==2.1.0 && pip install smdistributed_modelparallel-1.15.0-cp310.whl", [2]),
]

ARCHITECTURES: list[tuple[str, list[int]]] = [
    (f'{CUDA_12_4}ENV TORCH_CUDA_ARCH_LIST="3.7 8.0+PTX"', [2]),
    (f'{CUDA_12_4}ENV A=1 \\\n  TORCH_CUDA_ARCH_LIST="8.0 10.0"', [3]),
    (f"{CUDA_12_4}RUN TORCH_CUDA_ARCH_LIST='9.0;12.0' pip install a==1", [2]),
    (f"{CUDA_13}RUN make NVCC_GENCODE=-gencode=arch=compute_70,code=sm_70 src.build", [2]),
    (f"{CUDA_13}ENV CMAKE_CUDA_ARCHITECTURES=70;80;90", [2]),
]

# Rule, lines of a Dockerfile after BASE (which is line 1), lines on which the rule finds something.
# A text with a FROM of its own is the whole file.
BAD: list[tuple[str, str, list[int]]] = [
    ("syntax", "INSTALL gcc", [2]),
    ("syntax", "RUN <<EOF\nnever ends", [1]),
    ("unquoted-version-operator", "RUN pip install jinja2>=3.1.6", [2]),
    ("unquoted-version-operator", "RUN pip3 install --no-cache-dir torch torchvision>=0.15 numpy<2", [2]),
    ("unquoted-version-operator", "RUN apt-get update \\\n # why\n && python3 -m pip install 'a>=1' b>=2 && true", [4]),
    ("unquoted-version-operator", "RUN uv pip install a<2.1 && conda install -y b>1.0", [2]),
    ("unquoted-version-operator", "RUN bash -ec 'set -x; pip install a>=1'", [2]),
    ("unquoted-version-operator", "RUN <<EOT\nset -e\npip install a>=1\nEOT", [4]),
    ("unquoted-version-operator", 'RUN ["bash", "-c", "pip install a>=1"]', [2]),
    ("unquoted-version-operator", "ONBUILD RUN pip install a>=1", [2]),
    ("arg-not-declared-in-stage", "ARG V=1\nFROM debian:12\nRUN echo $V", [3]),
    ("arg-not-declared-in-stage", "ARG V=1\nFROM debian:12\nRUN true \\\n  && pip install a==${V}\nARG V", [4]),
    ("arg-not-declared-in-stage", "FROM debian:12 AS a\nARG V=1\nFROM debian:12\nENV W=$V", [4]),
    ("arg-not-declared-in-stage", "FROM debian:12 AS a\nARG T=12\nFROM debian:$T", [3]),
    ("arg-not-declared-in-stage", "FROM debian:12\nCOPY app-$TARGETARCH /app", [2]),
    ("arg-not-declared-in-stage", "ARG V=1\nFROM debian:12\nRUN sh -c 'echo $V'", [3]),
    ("version-compared-as-text", 'RUN if [[ "$EFA_VERSION" > "1.44.0" ]]; then echo new; fi', [2]),
    ("version-compared-as-text", 'RUN if [ "$V" \\> 1.44 ]; then echo new; fi; [ "$A" = b ]', [2]),
    ("version-compared-as-text", 'RUN test "$CUDA_VERSION" "<" "12.5" && echo old', [2]),
    ("version-compared-as-text", "RUN a \\\n && [[ $CUDA_VERSION < $OTHER ]] || b", [3]),
    ("download-unverified", "RUN curl -fsSLO https://a.example/b.tar.gz && tar xf b.tar.gz", [2]),
    ("download-unverified", "RUN cd /tmp \\\n && wget https://a.example/b.sh \\\n && sh b.sh", [3]),
    ("download-unverified", "RUN curl -fsSL https://a.example/b.sh | bash -s -- -y", [2]),
    ("download-unverified", "ARG URL\nFROM debian:12\nARG URL\nRUN curl -fo x $URL && md5sum -c x.md5", [4]),
    ("download-unverified", "RUN sha256sum --check old.txt && curl -fO https://a.example/b", [2]),
    ("download-unverified", "RUN bash <(curl -fsSL https://a.example/b.sh)", [2]),
    ("download-unverified", "RUN X=$(curl -fs https://a.example/newest) && echo $X", [2]),
    ("add-without-checksum", "ADD https://a.example/b.tar.gz /b.tar.gz", [2]),
    ("wheel-without-hash", "RUN pip install https://a.example/smp-1.0-cp38-cp38-linux_x86_64.whl", [2]),
    (
        "wheel-without-hash",
        'RUN X=1 python3.8 -m pip install -U "smp @ https://a.example/smp-1.0-py3-none-any.whl"',
        [2],
    ),
    ("plain-http", "RUN wget http://a.example/metis-5.1.0.tar.gz", [2]),
    ("plain-http", "ADD http://a.example/metis-5.1.0.tar.gz /", [2]),
    ("plain-http", "RUN git clone -b v1 http://a.example/b.git", [2]),
    ("plain-http", "RUN pip install --index-url http://a.example/simple a==1", [2]),
    ("tls-check-off", "RUN pip install --trusted-host index.example.org a==1", [2]),
    ("tls-check-off", "RUN curl -fkL https://a.example/b -o b", [2]),
    ("tls-check-off", "RUN curl --fail --insecure https://a.example/b", [2]),
    ("tls-check-off", "RUN wget -q --no-check-certificate https://a.example/b", [2]),
    ("tls-check-off", "ENV GIT_SSL_NO_VERIFY=1", [2]),
    ("tls-check-off", "RUN GIT_SSL_NO_VERIFY=true git clone -b v1 https://a.example/b.git", [2]),
    ("tls-check-off", "RUN git config --global http.sslVerify false", [2]),
    ("tls-check-off", "RUN git -c http.sslVerify=false clone https://a.example/b", [2]),
    ("tls-check-off", "RUN npm config set strict-ssl false", [2]),
    ("tls-check-off", "RUN apt-get -o Acquire::https::Verify-Peer=false update", [2]),
    ("package-signature-check-off", "RUN apt-get install -y --allow-unauthenticated a", [2]),
    ("package-signature-check-off", "RUN yum install -y --nogpgcheck a.rpm", [2]),
    (
        "package-signature-check-off",
        "RUN echo 'deb [trusted=yes] https://a.example ./' > /etc/apt/sources.list.d/a.list",
        [2],
    ),
    ("key-made-in-build", "RUN mkdir /root/.ssh && ssh-keygen -q -t rsa -N '' -f /root/.ssh/id_rsa", [2]),
    ("key-made-in-build", "RUN ssh-keygen -A", [2]),
    ("key-copied", "COPY id_rsa /root/.ssh/id_rsa", [2]),
    ("key-copied", "COPY deploy.pem app.py /app/", [2]),
    ("key-copied", "COPY --chown=0:0 .aws /root/.aws", [2]),
    ("key-copied", 'COPY ["home/.netrc", "/root/"]', [2]),
    ("private-key-text", "RUN echo '-----BEGIN OPENSSH PRIVATE KEY-----' > /k", [2]),
    ("private-key-text", "COPY <<EOF /k\n-----BEGIN PRIVATE KEY-----\nEOF", [3]),
    ("private-key-text", "RUN cat <<EOF > /k\n-----BEGIN RSA PRIVATE KEY-----\nEOF", [2]),
    ("secret-in-variable", "ENV AWS_SECRET_ACCESS_KEY=abc", [2]),
    ("secret-in-variable", 'ARG HF_TOKEN="hf_1"\nFROM debian:12', [1]),
    ("secret-in-variable", "ARG GITHUB_TOKEN\nENV GITHUB_TOKEN=$GITHUB_TOKEN", [3]),
    ("wheel-without-hash", "ARG SMP=https://a.example/smp-1.0-cp38-cp38-linux_x86_64.whl\nRUN pip install ${SMP}", [3]),
    ("plain-http", "ENV SITE=http://a.example METIS=$SITE/metis.tar.gz\nRUN wget ${SITE}/metis.tar.gz", [3]),
    (
        "git-requirement-of-branch",
        "ARG REF=main\nFROM debian:12\nARG REF\nRUN pip install git+https://a.example/b@$REF",
        [4],
    ),
    ("command-outside-run", 'ENV A=1 \\\n  CMAKE_PREFIX_PATH="$(dirname $(which conda))/.."', [3]),
    ("command-outside-run", "ARG DATE=`date`", [2]),
    ("stray-brace-in-path", "ENV LD_LIBRARY_PATH=/a/lib}:/b/lib", [2]),
    ("stray-brace-in-path", "ENV A=1 \\\n  PATH=/a:${PATH}}", [3]),
    (
        "plugin-path-of-old-efa",
        "ARG EFA_INSTALLER_VERSION=1.47.0\nENV LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:/b",
        [3],
    ),
    (
        "plugin-path-of-old-efa",
        (
            "RUN curl -fO https://a.example/aws-efa-installer-1.44.0.tar.gz \\\n"
            " && export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"
        ),
        [3],
    ),
    ("curl-without-fail", "RUN curl -sSL https://a.example/b -o b", [2]),
    ("curl-without-fail", "RUN curl -o f https://a.example/b", [2]),
    ("pipe-without-pipefail", "RUN curl -fsSL https://a.example/b | tar xz", [2]),
    ("pipe-without-pipefail", "RUN set -ex; wget -qO- https://a.example/b | tee /c | sh", [2]),
    ("pipe-without-pipefail", "RUN x=$(wget -qO- https://a.example/b | head -n 1)", [2]),
    ("git-clone-of-branch", "RUN git clone https://a.example/b.git && cd b && make", [2]),
    ("git-clone-of-branch", "RUN git clone -b main https://a.example/b.git", [2]),
    ("git-clone-of-branch", "RUN git clone https://a.example/b.git && cd b && git checkout && make", [2]),
    (
        "git-clone-of-branch",
        "RUN git clone https://a/b/c && git -C c checkout v1 && git clone https://a/b/d && make",
        [2],
    ),
    ("git-clone-of-branch", "ADD https://github.com/a/b.git#main /b", [2]),
    ("git-requirement-of-branch", "RUN pip install git+https://github.com/a/b.git", [2]),
    ("git-requirement-of-branch", 'RUN pip install "b @ git+https://github.com/a/b@main#egg=b"', [2]),
    ("git-checkout-of-nothing", "RUN git clone -b v1 https://a.example/b && cd b && git checkout && make", [2]),
    ("file-of-branch", "ADD https://raw.githubusercontent.com/a/b/master/src/c.py /c.py", [2]),
    ("file-of-branch", "RUN curl -fO https://raw.githubusercontent.com/a/b/refs/heads/main/c.py", [2]),
    ("file-of-branch", "RUN pip install https://github.com/a/b/archive/master.zip", [2]),
    ("failure-hidden", "RUN ./b2 -j 64 install || true", [2]),
    ("failure-hidden", "RUN make \\\n && ( make check || : )", [3]),
    ("failure-hidden", "RUN ./configure | true", [2]),
    ("failure-hidden", "RUN make install || exit 0", [2]),
    ("failure-hidden", "RUN cp a/*.h /usr/include || true && cp b /usr/lib", [2]),
    ("failure-hidden", "RUN make install && rm -rf build || true", [2]),
    ("failure-hidden", "RUN apt-get install -y a || true", [2]),
    ("host-key-check-off", "RUN echo '    StrictHostKeyChecking no' >> /etc/ssh/ssh_config", [2]),
    ("host-key-check-off", "RUN printf 'Host *\\n StrictHostKeyChecking no\\n' | tee -a /root/.ssh/config", [2]),
    ("host-key-check-off", "RUN echo 'UserKnownHostsFile /dev/null' >> /etc/ssh/ssh_config", [2]),
    ("host-key-check-off", "RUN sed -i 's/#\\(StrictHostKeyChecking \\).*/\\1no/g' /etc/ssh/ssh_config", [2]),
    ("host-key-check-off", "RUN scp -o StrictHostKeyChecking=no a@b:c .", [2]),
    ("host-key-check-off", "COPY <<EOF /root/.ssh/config\nHost *\nStrictHostKeyChecking no\nEOF", [3]),
    ("image-without-fixed-tag", "FROM debian", [1]),
    ("image-without-fixed-tag", "FROM a.example:5000/b/c:latest", [1]),
    ("image-without-fixed-tag", "ARG BASE=debian\nFROM ${BASE}", [2]),
    ("image-without-fixed-tag", "COPY --from=ghcr.io/astral-sh/uv:latest /uv /usr/bin/", [2]),
    ("image-without-fixed-tag", "RUN --mount=type=bind,from=busybox,target=/b /b/bin/ls", [2]),
    ("blank-line-in-instruction", "RUN a \\\n\n && b", [3]),
    ("blank-line-in-instruction", "ENV A=1 \\\n  B=2 \\\n   \n  C=3", [4]),
    (
        "python-version-in-library-path",
        "ENV LD_LIBRARY_PATH=/usr/lib/python3.12/site-packages/x/lib:$LD_LIBRARY_PATH",
        [2],
    ),
    ("package-sources-deleted", "RUN rm -rf /etc/apt/sources.list.d", [2]),
    ("package-sources-deleted", "RUN rm /etc/apt/sources.list.d/*", [2]),
    (
        "cuda-versions-differ",
        "ARG C=11.6.2\nFROM nvidia/cuda:${C}-devel-ubuntu20.04\nRUN pip install torch==1.12.1+cu113",
        [3],
    ),
    (
        "cuda-versions-differ",
        "FROM nvidia/cuda:12.8.0-base AS a\nFROM a\nRUN pip install -f https://b/whl/cu121 torch==2",
        [3],
    ),
    (
        "cuda-versions-differ",
        "FROM nvidia/cuda:13.0.1-devel-ubuntu22.04\nRUN pip install https://a.example/b-2.8+cu12torch2.9-cp312.whl",
        [2],
    ),
    ("version-argument-unused", "ARG NCCL_VERSION=2.26.2\nRUN make", [2]),
    ("version-argument-unused", "COPY a.sh /\nRUN sh /a.sh\nARG NCCL_VERSION=2.26.2\nRUN make", [4]),
    ("version-argument-unused", "COPY a.sh /\nARG NCCL_VERSION=2.26.2\nRUN bash -c 'make'", [3]),
    (
        "version-argument-unused",
        "FROM debian:12 AS a\nARG TE_TAG=1\nFROM debian:12 AS b\nCOPY a.sh /\nRUN sh /a.sh",
        [2],
    ),
    *[("incompatible-versions", text, lines) for text, lines in INCOMPATIBLE],
    (
        "versions-with-known-problem",
        "ENV NCCL_VERSION=2.26.2\nRUN curl -fO https://a.example/aws-efa-installer-1.27.0.tar.gz",
        [3],
    ),
    *[("versions-with-known-problem", text, lines) for text, lines in ARCHITECTURES],
    # AWS's image of TensorFlow 2.18
    (
        "declared-version-differs",
        "ARG NCCL_VERSION=2.23.4-1+cuda12.5\nRUN apt-get install -y \\\n libnccl2=2.27.7-1+cuda12.9",
        [4],
    ),
    (
        "incompatible-versions",
        f"{CUDA_12_4}ARG NCCL_VERSION=2.23.4-1+cuda12.4\nRUN apt-get install -y libnccl2=2.27.7-1+cuda12.9",
        [3],
    ),
    ("declared-version-differs", "FROM nvidia/cuda:12.8.1-base\nENV CUDA_VERSION=12.8.0", [1]),
    ("too-deeply-nested", "RUN " + "( " * 1100 + "a" + " )" * 1100, [2]),
    ("image-without-digest", "FROM debian:12.1", [1]),
    ("pip-without-versions", "RUN pip install -U numpy scipy==1.1", [2]),
    ("upgrade-in-build", "RUN apt-get update && apt-get -y upgrade", [2]),
    ("upgrade-in-build", "RUN dnf upgrade -y --security --releasever latest", [2]),
]

COMPATIBLE = [
    "RUN pip install torch==2.6.0+cu124 torchvision==0.21.0 && echo torch==2.6.0+cu121",
    f"{CUDA_12_4}RUN pip install torch==2.6.0 --index-url https://download.pytorch.org/whl/cu124",
    # the wheel brings its own libraries
    f"{CUDA_12_4}RUN pip install 'tensorflow[and-cuda]==2.20.0'",
    f"{CUDA_12_4}RUN apt-get install -y libnccl2=2.21.5-1+cuda12.4",
    f"{CUDA_12_4}RUN apt-get install -y libnccl2=2.20.5-1+cuda12.2",
    f"{CUDA_12_4}RUN git clone -b v2.10.3-1 https://github.com/NVIDIA/nccl.git && make NVCC_GENCODE=a src.build",
    # two versions of one part: it is not known which one counts
    "FROM ubuntu:20.04\nRUN a efa/aws-efa-installer-1.43.0.tar.gz || a efa/aws-efa-installer-1.42.0.tar.gz",
    "FROM nvidia/cuda:12.9.1-devel-amzn2023\n" + EFA.format("1.49.0", "").replace("-y", "-y -n --disable-ngc"),
    # the installer runs in a script of the build context
    "FROM nvidia/cuda:12.9.1-devel-amzn2023\nARG EFA_VERSION=1.49.0\nCOPY efa.sh /\nRUN bash /efa.sh $EFA_VERSION",
    f"FROM debian:12\nARG NCCL_VERSION=2.21.5-1\n{PLUGIN.format('1.14.2')}",
    "RUN git clone -b v5.2.1 https://github.com/KarypisLab/METIS.git && git clone https://github.com/KarypisLab/GKlib",
    # versions of another stage
    "FROM python:3.13 AS a\nRUN python -V\nFROM python:3.11\nRUN pip install torch==2.4.1",
    "ARG OPEN_MPI_VERSION=4.1.5\nRUN pip install torch==2.0.1 smdistributed_dataparallel-1.8.0-cp310.whl",
]

COMPATIBLE_ARCHITECTURES = [
    f'{CUDA_12_4}ENV TORCH_CUDA_ARCH_LIST="7.0 7.5 8.0 8.6 9.0+PTX"',
    "FROM nvidia/cuda:12.8.1-devel-ubuntu22.04\nENV TORCH_CUDA_ARCH_LIST='8.0 9.0a 10.0 12.0+PTX'",
    f"{CUDA_13}ENV CMAKE_CUDA_ARCHITECTURES=75;80;90a;100f;120",
]

GOOD: list[tuple[str, str]] = [
    *[("incompatible-versions", text) for text in COMPATIBLE],
    *[("versions-with-known-problem", text) for text in COMPATIBLE_ARCHITECTURES],
    (
        "declared-version-differs",
        "ARG EFA_VERSION=1.47.0\nRUN curl -fO https://a.example/aws-efa-installer-$EFA_VERSION",
    ),
    ("declared-version-differs", "FROM nvidia/cuda:12.8.1-base\nARG CUDA_VERSION=12.8\nARG PYTHON_VERSION=3.11"),
    (
        "versions-with-known-problem",
        "ENV NCCL_VERSION=2.26.2\nRUN curl -fO https://a.example/aws-efa-installer-1.29.1.tar.gz",
    ),
    ("too-deeply-nested", "RUN " + "( " * 300 + "a" + " )" * 300),
    ("failure-hidden", "RUN rm -rf /root/.cache || true; pip uninstall -y a || true; rm a 2>/dev/null || true"),
    ("failure-hidden", "RUN find / -name '*.pyc' -exec rm {} + || true && apt-get purge -y a && rm -f b || :"),
    ("pipe-without-pipefail", "RUN x=$(wget -qO- https://a.example/b | grep -Po 'v[0-9.]+') && echo $x"),
    # an ARG is in the environment of the script
    (
        "version-argument-unused",
        "ARG TE_TAG=1\nCOPY docker/install_dep.sh /opt/\nRUN bash /opt/install_dep.sh --library te",
    ),
    (
        "version-argument-unused",
        "ARG GCC_VERSION\nCOPY ./common/install_gcc.sh install_gcc.sh\nRUN bash ./install_gcc.sh && rm install_gcc.sh",
    ),
    ("version-argument-unused", "ARG CLANG_VERSION\nRUN --mount=type=bind,source=ci,target=/ci /ci/install.sh"),
    ("version-argument-unused", "FROM debian:12 AS a\nARG MLM_TAG=1\nFROM a\nCOPY i.py /\nRUN python /i.py"),
    ("cuda-versions-differ", "FROM nvidia/cuda:12.4.1-base\nRUN pip install https://a/flash_attn-2.8+cu12torch2.6.whl"),
    ("host-key-check-off", "RUN sed -i '/StrictHostKeyChecking/d; s/^Port 22$/Port 23/' /etc/ssh/ssh_config"),
    (
        "plugin-path-of-old-efa",
        "ARG EFA_VERSION=1.50.0\nENV LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/ofi-nccl/lib/x86-linux-gnu",
    ),
    ("version-compared-as-text", "RUN [[ $SERVER < m && $OVER > $UNDER ]] && echo x"),
    ("arg-not-declared-in-stage", "ARG https_proxy\nFROM debian:12\nRUN curl --proxy $https_proxy"),
    ("command-outside-run", "ENV A='x' B=${A} C=\\$(x)\nRUN echo $(date) `date`\nLABEL a='`b`'"),
    ("upgrade-in-build", "RUN apt-get -y upgrade --only-upgrade systemd && dnf upgrade -y openssl"),
    ("syntax", "run echo keywords may be small"),
    ("unquoted-version-operator", "RUN pip install \"jinja2>=3.1.6\" 'numpy<2' a~=1.0 b!=2"),
    (
        "unquoted-version-operator",
        "RUN echo 'pip install a>=1'\n# RUN pip install a>=1\nRUN a \\\n # pip install a>=1\n b",
    ),
    ("unquoted-version-operator", "RUN pip list >versions.txt 2>errors.txt && make >/dev/null 2>&1 && echo x>1"),
    ("unquoted-version-operator", 'RUN bash -c "pip install \\"a>=1\\""'),
    ("unquoted-version-operator", "COPY <<EOF /r.txt\njinja2>=3.1.6\nEOF"),
    ("unquoted-version-operator", "RUN cat <<EOF > /r.txt\njinja2>=3.1.6\nEOF"),
    ("unquoted-version-operator", "RUN <<EOF python3\nassert 2>=1\nEOF"),
    ("unquoted-version-operator", 'RUN ["pip", "install", "a>=1"]'),
    ("arg-not-declared-in-stage", "ARG V=1\nFROM debian:$V\nARG V\nRUN echo $V"),
    ("arg-not-declared-in-stage", "FROM debian:12 AS a\nARG V=1\nFROM a\nRUN echo $V"),
    (
        "arg-not-declared-in-stage",
        "ARG V=1\nFROM debian:12\nRUN V=2; echo $V '$V' \\$V\nRUN for V in 1 2; do echo $V; done",
    ),
    ("arg-not-declared-in-stage", "ARG V=1\nFROM debian:12\nENV V=3\nRUN echo $V $HOME $PATH"),
    ("arg-not-declared-in-stage", "ARG V=1\nFROM debian:12\nRUN echo ${V:-2}\n# $V\nLABEL a='$V'"),
    ("arg-not-declared-in-stage", "FROM --platform=$BUILDPLATFORM debian:12\nARG TARGETARCH\nRUN echo $TARGETARCH"),
    ("version-compared-as-text", 'RUN if [ "$(printf "%s\\n" 1.44 "$V" | sort -V | head -n1)" = 1.44 ]; then a; fi'),
    (
        "version-compared-as-text",
        "RUN [ \"$COUNT\" -gt 3 ] && (( VERSION > 3 )) && [[ $NAME < m ]] && echo 'a > 1.0' > /b",
    ),
    ("version-compared-as-text", 'RUN [ "$V" = 1.44.0 ] || [[ "$V" == 1.* ]]'),
    ("download-unverified", 'RUN curl -fO https://a.example/b && echo "0  b" | sha256sum -c - && tar xf b'),
    ("download-unverified", "RUN wget https://a.example/b https://a.example/b.sig && gpg --verify b.sig b"),
    ("download-unverified", "RUN echo 'curl https://a.example' && curl --version && curl -fsI https://a.example"),
    (
        "download-unverified",
        "RUN apt-get install -y curl wget && rm -rf /usr/share/doc/curl\nHEALTHCHECK CMD curl -f http://localhost/",
    ),
    ("download-unverified", "RUN curl -f http://localhost:8080/ready && curl -X POST -f https://a.example/hook"),
    ("download-unverified", "RUN curl -fO https://a.example/b \\\n && sh -c 'echo \"0  b\" | sha256sum -c'"),
    ("add-without-checksum", "ADD --checksum=sha256:0 https://a.example/b /b\nADD b.tar.gz /\nCOPY c /c"),
    (
        "wheel-without-hash",
        "RUN pip install https://a.example/b-1-py3-none-any.whl#sha256=0 && pip install -i https://a.example/s b==1",
    ),
    ("wheel-without-hash", "RUN pip install --extra-index-url https://a.example/simple b==1 ./c.whl"),
    (
        "plain-http",
        "RUN wget http://a.example/b && echo '0  b' | sha256sum --check\nENV http_proxy=http://a.example:3128",
    ),
    ("plain-http", "RUN curl -f http://127.0.0.1/ && echo http://a.example"),
    ("tls-check-off", "RUN curl -fL -o k https://a.example/b && curl -fsSLo /k-x https://a.example/k"),
    ("tls-check-off", "RUN echo 'do not use --trusted-host or curl -k'\nENV GIT_SSL_NO_VERIFY=0"),
    ("tls-check-off", "RUN git config --global http.sslVerify true && git config --global user.name x"),
    (
        "package-signature-check-off",
        "RUN echo 'deb [signed-by=/k.gpg] https://a.example ./' > /etc/apt/sources.list.d/a.list",
    ),
    (
        "key-made-in-build",
        "RUN ssh-keygen -R host && ssh-keygen -lf /k.pub && echo ssh-keygen -A && rm -f /etc/ssh/ssh_host_*",
    ),
    ("key-copied", "COPY ca.pem global-bundle.pem id_rsa.pub known_hosts /x/\nCOPY keys.py key/ /x/"),
    ("key-copied", "RUN --mount=type=secret,id=id_rsa ls"),
    ("private-key-text", "RUN ! grep -r -e '-----BEGIN RSA PRIVATE KEY-----' /opt\n# -----BEGIN RSA PRIVATE KEY-----"),
    ("private-key-text", "COPY <<EOF /c\n-----BEGIN PUBLIC KEY-----\nEOF"),
    (
        "secret-in-variable",
        "ARG HF_TOKEN\nENV TOKENIZERS_PARALLELISM=false PASSWORD_FILE=/run/p DB_PASSWORD=/run/secrets/p",
    ),
    ("secret-in-variable", "ENV MAX_TOKENS=12 SECRET_KEY_ROTATION=7 USE_TOKEN=true"),
    (
        "stray-brace-in-path",
        "ENV PATH=/a:${PATH}:${B:-/c}:${D:-${E}}\nENV LD_LIBRARY_PATH /x:$LD_LIBRARY_PATH\nENV JSON={}",
    ),
    (
        "plugin-path-of-old-efa",
        "ARG EFA_VERSION=1.43.1\nENV LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    ),
    ("plugin-path-of-old-efa", "ARG EFA_VERSION=1.47.0\nENV LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib"),
    ("curl-without-fail", "RUN curl -fsSLO https://a.example/b && curl -sSfL -o x https://a.example/b"),
    ("curl-without-fail", "RUN curl --fail-with-body https://a.example/b && curl $CURL_OPTS https://a.example/b"),
    ("curl-without-fail", "RUN echo 'curl https://a.example' > /readme && apt-get install -y curl"),
    ("pipe-without-pipefail", "RUN set -o pipefail; curl -fs https://a.example/b | tar xz"),
    ("pipe-without-pipefail", "RUN set -euo pipefail && curl -fs https://a.example/b | tar xz"),
    ("pipe-without-pipefail", 'SHELL ["/bin/bash", "-o", "pipefail", "-c"]\nRUN curl -f https://a.example/b | tar xz'),
    ("pipe-without-pipefail", "RUN bash -o pipefail -c 'curl -f https://a.example/b | tar xz'\nRUN ls | sort"),
    (
        "git-clone-of-branch",
        'RUN git clone -b v1.2 --depth 1 https://a.example/b.git && git clone --branch="$TAG" https://a.example/c',
    ),
    ("git-clone-of-branch", "RUN git clone https://a.example/b.git\nRUN cd b && git checkout 0123abc && make"),
    (
        "git-clone-of-branch",
        "RUN git clone https://a/b && git clone https://a/c && git -C b checkout v1 && git -C c checkout v2",
    ),
    ("git-clone-of-branch", "RUN echo git clone https://a.example/b.git\nADD https://github.com/a/b.git#v1.0 /b"),
    (
        "git-requirement-of-branch",
        "RUN pip install git+https://github.com/a/b@0123456789abcdef0123456789abcdef01234567",
    ),
    (
        "git-requirement-of-branch",
        'RUN pip install "b @ git+https://github.com/a/b@v1.2" git+https://github.com/a/c@$COMMIT',
    ),
    ("git-checkout-of-nothing", "RUN git checkout v1 && git checkout -- . && git checkout -b x"),
    (
        "file-of-branch",
        "RUN curl -fO https://raw.githubusercontent.com/a/main/0123abc/c.py && echo github.com/a/b/raw/main/c",
    ),
    ("failure-hidden", "RUN grep -q x /etc/passwd || true; test -e a || false; echo '|| true'; a || b"),
    ("failure-hidden", "RUN while true; do break; done # || true"),
    (
        "host-key-check-off",
        "RUN echo 'never set StrictHostKeyChecking no'; ! grep -r 'StrictHostKeyChecking no' /etc/ssh",
    ),
    ("host-key-check-off", "RUN echo 'StrictHostKeyChecking accept-new' > /etc/ssh/ssh_config.d/a.conf"),
    ("image-without-fixed-tag", "FROM debian:12 AS a\nFROM a\nCOPY --from=a /x /x\nCOPY --from=0 /x /x\nFROM scratch"),
    ("image-without-fixed-tag", "ARG BASE\nFROM $BASE\nFROM debian:latest@sha256:0\nFROM a.example:5000/b:1"),
    ("blank-line-in-instruction", "RUN a \\\n # comment\n && b\n\nRUN <<EOF\na\n\nb\nEOF\n"),
    ("blank-line-in-instruction", "# escape=`\nFROM debian:12\nRUN a \\\n\nRUN b"),
    ("python-version-in-library-path", "ENV PATH=/opt/python3.12/bin LD_LIBRARY_PATH=/opt/lib/python$V/x"),
    (
        "package-sources-deleted",
        "RUN rm -rf /etc/apt/sources.list.d/cuda.list /var/lib/apt/lists/* && echo rm /etc/apt/sources.list",
    ),
    ("cuda-versions-differ", "FROM nvidia/cuda:12.1.1-base\nRUN pip install torch==2.4.1+cu121 cupy==1"),
    ("version-argument-unused", "ARG NCCL_VERSION=2.26.2\nRUN make v=${NCCL_VERSION} && echo ARG"),
    ("image-without-digest", "FROM debian:12@sha256:0\nFROM local/base:bookworm-a1bd2dc6aaaf\nFROM scratch"),
    (
        "pip-without-versions",
        "RUN pip install -r r.txt && pip install a==1 ./b . && pip install -c c.txt d && echo pip install e",
    ),
    (
        "upgrade-in-build",
        "RUN apt-get install -y --only-upgrade a && pip install --upgrade b && apk update && echo apt upgrade",
    ),
]


def whole(text: str) -> str:
    return f"{text}\n" if "FROM " in text else f"{BASE}{text}\n"


def lines_of(rule: str, text: str) -> list[int]:
    return [finding.line for finding in lint(whole(text)) if finding.rule == rule]


@pytest.mark.parametrize(("rule", "text", "lines"), BAD)
def test_found_on_its_line(rule: str, text: str, lines: list[int]) -> None:
    assert sorted(set(lines_of(rule, text))) == lines


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_nothing_where_nothing_is_wrong(rule: str, text: str) -> None:
    assert lines_of(rule, text) == []


def test_every_rule_is_tested_both_ways() -> None:
    names = {rule.name for rule in RULES}
    assert len(names) == len(RULES)
    assert {rule for rule, _, _ in BAD} == names
    assert {rule for rule, _ in GOOD} == names
