# Two clouds, one GPU pool each, and a VPN between them. Each cluster gets a router that uses the engines of both:
# its own island first, the other one if that is faster in spite of the distance (docs/concepts/islands.md).
terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.60"
    }
    google = {
      source  = "hashicorp/google"
      version = "~> 6.0"
    }
  }
}

provider "aws" {
  region = var.aws_region
}

provider "google" {
  project = var.gcp_project
  region  = var.gcp_region
}

module "eks" {
  source = "../eks"
  name   = var.name
  peer   = { address = module.gke.vpn_address, cidrs = module.gke.cidrs }
}

module "gke" {
  source     = "../gke"
  name       = var.name
  region     = var.gcp_region
  gpu_zone   = var.gcp_gpu_zone
  peered     = true
  peer       = module.eks.vpn
  peer_cidrs = ["10.10.0.0/16"]
}

# Values of the Helm chart, for each cluster.
locals {
  values = {
    for home, other in { eks = "gke", gke = "eks" } : home => templatefile("${path.module}/values.yaml.tftpl", {
      home_island       = home == "eks" ? module.eks.island : module.gke.island
      other_island      = home == "eks" ? module.gke.island : module.eks.island
      other             = other
      egress_usd_per_gb = home == "eks" ? 0.09 : 0.12
    })
  }
}

output "kubeconfig_commands" {
  value = { eks = module.eks.kubeconfig_command, gke = module.gke.kubeconfig_command }
}

output "values" {
  value       = local.values
  description = "helm install warmroute deploy/helm/warmroute -f FILE"
}
