(** * The row certificate (core/algorithms.py, certification_flow)

    What a clean image must satisfy, and what is then true of every attacked image. Both algorithms use no more. *)

From Coq Require Import List Bool Arith Lia.
From PatchCleanser Require Import Images.
Import ListNotations.

Section RowCertificate.
  Context {pixel value : Type}.
  Variable masks : list (region pixel).
  Variable labels : image pixel value -> table label.
  Hypothesis visible : function_of_visible masks labels.
  Variable R : threat pixel.

  (** Every two-mask label is the true one: the paper's Definition 2. *)
  Definition two_mask_correct (x : image pixel value) (y : label) : Prop :=
    forall i j, i < length masks -> j < length masks -> labels x i j = y.

  Definition good (x : image pixel value) (y : label) (i : nat) : Prop :=
    forall j, j < length masks -> labels x i j = y.

  (** The good masks alone still cover the threat. *)
  Definition row_certified (x : image pixel value) (y : label) : Prop :=
    forall patch, R patch -> exists i, i < length masks /\ hides (mask masks i) patch /\ good x y i.

  Theorem two_mask_correctness_implies_the_row_certificate : forall x y,
    covers masks R -> two_mask_correct x y -> row_certified x y.
  Proof.
    intros x y Hcovers Hcorrect patch HR.
    destruct (Hcovers patch HR) as [i [Hi Hhides]].
    exists i. repeat split; auto. intros j Hj. now apply Hcorrect.
  Qed.

  Theorem some_good_row_survives_the_attack : forall x y x',
    row_certified x y -> attacked R x x' -> exists i, i < length masks /\ good x' y i.
  Proof.
    intros x y x' Hcert [patch [HR Hsame]].
    destruct (Hcert patch HR) as [i [Hi [Hhides Hgood]]].
    exists i. split; [assumption|]. intros j Hj.
    rewrite <- (Hgood j Hj). now apply hidden_patch_changes_no_answer with (masks := masks) (patch := patch).
  Qed.
End RowCertificate.
